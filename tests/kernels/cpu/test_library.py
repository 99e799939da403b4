"""The library's cache: built once, private, checked; and what is said where nothing can be built."""

import fcntl
import os
import platform
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kernels.cpu.build
import kernels.cpu.library
import kernels.cpu.library_file
from kernels.cpu.build import (
    VARIANTS,
    CpuLibraryError,
    build,
    find_compiler,
    is_intact,
    source_hash,
    usable_variants,
    variants_of,
    with_digest,
)
from kernels.cpu.library import load_cpu_library
from kernels.cpu.library_file import find_library_soon

SOURCE = "void pool_start(int n) { (void)n; }\nvoid pool_wake(void) {}\nvoid amx_use(int n) { (void)n; }\n"


@pytest.fixture(scope="module")
def copying_compiler(tmp_path_factory) -> Path:
    """A compiler that links everything to one library, which the real one has made of SOURCE. It takes milliseconds;
    the real one takes 0.3 s, most of it for the headers of the instructions."""
    folder = tmp_path_factory.mktemp("compiler")
    source, library, compiler = folder / "pool.c", folder / "library.so", folder / "copying-cc"
    source.write_text(SOURCE)
    subprocess.run([*find_compiler().command, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    cases = f'*" -shared "*) cp {library} "$output" ;; *" -o "*) echo > "$output" ;; *) echo copying-cc 1.0 ;;'
    compiler.write_text(f'#!/bin/sh\nfor output; do :; done\ncase " $* " in {cases} esac\n')
    compiler.chmod(0o755)
    return compiler


@pytest.fixture
def cache(tmp_path, monkeypatch, copying_compiler):
    """An empty cache, and sources that compile in a moment."""
    cache = make_cache(tmp_path, monkeypatch)
    monkeypatch.setenv("CC", str(copying_compiler))
    return cache


@pytest.fixture
def compiled_cache(tmp_path, monkeypatch):
    """As `cache`, for the real compiler."""
    return make_cache(tmp_path, monkeypatch)


def make_cache(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "pool.c").write_text(SOURCE)
    monkeypatch.setattr(kernels.cpu.build, "SOURCE_FOLDER", sources)
    monkeypatch.setattr(
        kernels.cpu.build, "FLAGS", tuple(f for f in kernels.cpu.build.FLAGS if f != "-fvisibility=hidden")
    )
    monkeypatch.setattr(kernels.cpu.library_file, "PREBUILT_FOLDER", sources / "prebuilt")
    monkeypatch.setattr(kernels.cpu.library, "check_structs", lambda library: None)  # these sources have none
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engine-core" / "kernels"


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def test_is_built_once_into_a_private_folder(compiled_cache, monkeypatch):
    cache = compiled_cache
    assert load_cpu_library().variant == usable_variants()[0]
    assert cache.stat().st_mode & 0o777 == cache.parent.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in cache.iterdir()} == {".so", ""}  # the library and the lock: nothing is left over
    (path,) = libraries(cache)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(kernels.cpu.library_file, "build", None)
    load_cpu_library()
    assert path.stat().st_mtime_ns == before


def test_a_thread_of_its_own_builds_ahead(cache, monkeypatch):
    find_library_soon().join()
    assert len(libraries(cache)) == 1
    monkeypatch.setattr(kernels.cpu.library_file, "build", None)
    load_cpu_library()
    monkeypatch.setenv("CC", "no-such-compiler")
    find_library_soon().join()  # what is wrong is said by load_cpu_library()


def test_other_sources_flags_or_compilers_are_other_files(cache, monkeypatch):
    hashes = {source_hash(variant, compiler) for variant in VARIANTS for compiler in ("", "cc 1", "cc 2")}
    assert len(hashes) == 3 * len(VARIANTS)
    source = kernels.cpu.build.SOURCE_FOLDER / "pool.c"
    source.write_text(source.read_text() + "\n")
    assert source_hash("portable") not in hashes


@pytest.mark.parametrize("damage", ["truncated", "modified", "empty"])
def test_a_damaged_file_is_built_again(cache, damage):
    load_cpu_library("portable")
    (path,) = libraries(cache)
    content = path.read_bytes()
    damaged = {"truncated": content[:-100], "modified": content[:500] + b"x" + content[501:], "empty": b""}[damage]
    assert not is_intact(damaged)
    path.unlink()  # the library is mapped: another file, as it would be found by the next process
    path.write_bytes(damaged)
    load_cpu_library("portable")
    assert is_intact(path.read_bytes())


def test_a_folder_that_others_may_enter_is_refused(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    with pytest.raises(CpuLibraryError, match=r"mode 0700.*mode 0755"):
        load_cpu_library()
    cache.chmod(0o700)
    load_cpu_library()


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch):
    load_cpu_library()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CpuLibraryError, match="user 12345"):
        load_cpu_library()


def test_a_link_in_the_folders_place_is_refused(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.parent.mkdir(parents=True)
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CpuLibraryError, match="must be a folder"):
        load_cpu_library()


def test_a_cache_that_cannot_be_made_says_so(cache, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CpuLibraryError, match="cannot make the folder"):
        load_cpu_library()


def test_no_compiler_says_which_was_looked_for(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -x")
    with pytest.raises(CpuLibraryError, match="no C compiler: no-such-compiler -x"):
        load_cpu_library()


def test_a_compiler_that_is_no_command_line_is_none(cache, monkeypatch):
    monkeypatch.setenv("CC", "cc 'x")
    with pytest.raises(CpuLibraryError, match=r"no C compiler: CC=\"cc 'x\" is no command line \(No closing"):
        load_cpu_library()


def test_a_user_without_a_home_is_told(cache, monkeypatch):
    """A container may run under a user number without an entry."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(CpuLibraryError, match="no folder for kernels: neither XDG_CACHE_HOME nor a home"):
        load_cpu_library()


def test_a_compiler_that_fails_is_quoted(compiled_cache):
    (kernels.cpu.build.SOURCE_FOLDER / "pool.c").write_text("int main( {")
    with pytest.raises(CpuLibraryError, match=r"failed: .*error"):
        load_cpu_library()
    assert libraries(compiled_cache) == []


@pytest.mark.parametrize("hanging", ["compiling", "linking"])
def test_a_compiler_that_hangs_is_given_up_and_killed(cache, monkeypatch, tmp_path, hanging):
    """The compiler's children are killed too: here a shell, whose sleep holds the shell's standard output open. What
    comes before it hangs takes no time, so that it is reached within the limit on a busy machine too."""
    compiler, pids = tmp_path / "hanging-cc", tmp_path / "pids"
    option = {"compiling": "-c", "linking": "-shared"}[hanging]
    compiler.write_text(
        "#!/bin/sh\nfor output; do :; done\n"
        f'case " $* " in *" {option} "*) sleep 600 & echo $! >> {pids}; wait ;; *" -o "*) touch "$output" ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(kernels.cpu.library_file, "BUILD_S", 2.0)
    began = time.monotonic()
    with pytest.raises(CpuLibraryError, match=r"hanging-cc did not finish within [012] s"):
        load_cpu_library()
    assert time.monotonic() - began < 30.0
    (sleeper,) = pids.read_text().split()
    while is_running(int(sleeper)):  # killed, but nobody waits for it to be gone
        assert time.monotonic() - began < 30.0
        time.sleep(0.01)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_process_that_holds_the_lock_is_not_waited_for_for_ever(cache, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(kernels.cpu.library_file, "BUILD_S", 0.1)
    with (cache / "lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(
            CpuLibraryError, match=r"another process is building, and holds .*/lock for more than 0.1 s"
        ):
            load_cpu_library()


def test_what_a_killed_build_has_left_goes_with_the_next(cache):
    cache.mkdir(parents=True, mode=0o700)
    (cache / "build-killed").mkdir()
    (cache / "build-killed" / "pool.o").write_bytes(b"half an object")
    load_cpu_library()
    assert not (cache / "build-killed").exists()


def test_what_is_prebuilt_needs_no_compiler(cache, monkeypatch, tmp_path):
    folder = kernels.cpu.library_file.PREBUILT_FOLDER
    folder.mkdir()
    path = folder / f"portable-{source_hash('portable')}.so"
    path.write_bytes(with_digest(build("portable", find_compiler(), tmp_path)))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load_cpu_library("portable").variant == "portable"
    assert not cache.exists()


def test_what_is_prebuilt_and_does_not_load_is_built(cache):
    folder = kernels.cpu.library_file.PREBUILT_FOLDER
    folder.mkdir()
    (folder / f"portable-{source_hash('portable')}.so").write_bytes(with_digest(b"for another machine"))
    assert load_cpu_library("portable").variant == "portable"
    assert len(libraries(cache)) == 1


@pytest.mark.parametrize(
    ("vendor", "extra", "best"),
    [
        ("AuthenticAMD", "avx512_bf16 avx512_vnni avx512vbmi", "avx512bf16"),
        ("AuthenticAMD", "avx512_bf16 avx512_vnni", "avx512"),
        ("GenuineIntel", "avx512_bf16 avx512_vnni avx512vbmi", "avx512"),
        ("GenuineIntel", "", "avx512"),
    ],
)
def test_the_best_variant_depends_on_the_make_of_the_cpu(vendor, extra, best, monkeypatch, tmp_path):
    words = sorted(VARIANTS["avx512"].needs)
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t: {' '.join(words)} {extra}\n")
    monkeypatch.setattr(kernels.cpu.build, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    usable = usable_variants()
    assert usable[0] == best
    assert set(usable) == set(variants_of()) - {"amx"} - (set() if "vbmi" in extra else {"avx512bf16"})
    assert usable[-2:] == ["avx2", "portable"]


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        ({16: 1 << 1}, ["neon", "portable"]),
        ({16: 1 << 1 | 1 << 20}, ["neon_dot", "neon", "portable"]),
        ({16: 1 << 1 | 1 << 20, 26: 1 << 14}, ["neon_dot", "neon", "portable"]),
        ({16: 1 << 1 | 1 << 20, 26: 1 << 13 | 1 << 14}, ["neon_bf16", "neon_dot", "neon", "portable"]),
    ],
)
def test_on_arm_the_kernel_says_what_the_cpu_has(values, usable, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(kernels.cpu.build, "_auxiliary_value", lambda kind: values.get(kind, 0))
    assert usable_variants() == usable
    assert variants_of() == ["neon_bf16", "neon_dot", "neon", "portable"]


def test_a_variant_this_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(kernels.cpu.library_file, "runnable_variants", lambda: ["portable"])
    with pytest.raises(CpuLibraryError, match="can run the kernels portable, but not 'avx2'"):
        load_cpu_library("avx2")


@pytest.mark.parametrize("refused", ["", "c-header"])
def test_many_files_share_a_compiled_header_where_the_compiler_makes_one(
    refused, compiled_cache, copying_compiler, monkeypatch, tmp_path
):
    monkeypatch.setattr(kernels.cpu.build, "MANY_FILES", 2)
    for number in range(kernels.cpu.build.MANY_FILES):
        (kernels.cpu.build.SOURCE_FOLDER / f"more_{number}.c").write_text(f"int more_{number}(void) {{ return 0; }}\n")
    runs, compiler = tmp_path / "runs", tmp_path / "noting-cc"
    real = shlex.join(find_compiler().command)
    refusal, program = (f"*{refused}*) exit 1 ;;", copying_compiler) if refused else ("", real)
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {runs}\ncase "$*" in {refusal} esac\nexec {program} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert load_cpu_library("portable").variant == "portable"
    lines = runs.read_text().splitlines()
    assert sum("c-header" in line for line in lines) == 1
    assert sum("-include common.h" in line for line in lines) == kernels.cpu.build.MANY_FILES + 1


def test_who_starts_together_builds_once(cache, copying_compiler, monkeypatch, tmp_path):
    """Threads here; the lock is of the open file, so it holds among them as among processes. The compiler is wrapped in
    one that notes its runs, and takes long enough for all to come."""
    runs, compiler = tmp_path / "runs", tmp_path / "slow-cc"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo run >> {runs}; sleep 0.2 ;; esac\n'
        f'exec {copying_compiler} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with ThreadPoolExecutor(3) as threads:
        loaded = list(threads.map(load_cpu_library, ["portable"] * 3))
    assert [library.variant for library in loaded] == ["portable"] * 3
    assert runs.read_text().split() == ["run"] * 2  # one compiles, one links
    assert len(libraries(cache)) == 1
