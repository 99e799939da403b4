/* A plugin of QEMU's: how many instructions the emulated process has executed.
 *
 * A system call MARK, which no Linux has, writes a line to standard error: its first argument, then the count. The
 * declarations are those of QEMU's interface for plugins, version 1.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

enum { MARK = 1000000 };

typedef struct Block Block; /* of instructions that run one after the other */

size_t qemu_plugin_tb_n_insns(const Block *block);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t plugin, void (*call)(uint64_t plugin, Block *block));
void qemu_plugin_register_vcpu_tb_exec_inline(Block *block, int operation, void *number, uint64_t value);
void qemu_plugin_register_vcpu_syscall_cb(uint64_t plugin,
                                          void (*call)(uint64_t plugin, unsigned cpu, int64_t number, uint64_t first,
                                                       uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                                       uint64_t));

EXPORT int qemu_plugin_version = 1;

static uint64_t count;

static void translated(uint64_t plugin, Block *block) {
    (void)plugin;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &count, qemu_plugin_tb_n_insns(block)); /* 0: add */
}

static void called(uint64_t plugin, unsigned cpu, int64_t number, uint64_t first, uint64_t b, uint64_t c, uint64_t d,
                   uint64_t e, uint64_t f, uint64_t g, uint64_t h) {
    (void)plugin, (void)cpu, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
    if (number == MARK) fprintf(stderr, "mark %" PRIu64 " %" PRIu64 "\n", first, count);
}

EXPORT int qemu_plugin_install(uint64_t plugin, const void *system, int num_arguments, char **arguments) {
    (void)system, (void)num_arguments, (void)arguments;
    qemu_plugin_register_vcpu_tb_trans_cb(plugin, translated);
    qemu_plugin_register_vcpu_syscall_cb(plugin, called);
    return 0;
}
