"""The table of subcommands: the module of each, its line in --help, and the headings there."""

#: Subcommand -> (module with main(arguments) -> exit status, line in --help).
COMMANDS = {
    "chat": ("tools.commands.chat", "chat with a model in the terminal, or answer one prompt as plain text"),
    "run": ("tools.commands.chat", "the same as chat"),
    "generate": ("tools.commands.generate", "stream the answers to some prompts in the terminal"),
    "embed": ("tools.commands.embed", "print the embeddings of texts and images, one JSON object a line"),
    "pull": ("tools.commands.pull", "download a model from the Hugging Face Hub, or update the cached copy"),
    "list": ("tools.commands.list", "list the models in the cache"),
    "ps": ("tools.commands.ps", "list the models that a server with many has in memory"),
    "stop": ("tools.commands.stop", "let a model of a server with many leave the memory"),
    "inspect": ("tools.commands.inspect", "say what a model's files hold, what it needs and what of it runs"),
    "rm": ("tools.commands.rm", "remove a model from the cache"),
    "serve": ("tools.commands.serve", "run an engine that clients connect to"),
    "route": ("tools.commands.route.__main__", "serve several running engines as one"),
    "worker": ("tools.commands.worker", "run a part of an engine's model on this machine, for an engine on another"),
    "ray": ("tools.commands.ray_fleet.__main__", "serve several engines as one, placed and restarted by Ray"),
    "http": ("tools.commands.http", "serve a running engine over HTTP, with OpenAI's API"),
    "batch": ("tools.commands.batch", "answer a file of requests in OpenAI's batch format"),
    "explain": ("tools.commands.explain", "explain why a request of a running engine does not run"),
    "top": ("tools.commands.top.__main__", "show a running engine live"),
    "keys": ("tools.commands.keys", "make keys for engines that listen on a network"),
    "control": ("tools.commands.control", "pause, resume or drain a running engine"),
    "record": ("tools.commands.record.__main__", "record how another server is used, as a proxy in front of it"),
    "replay": ("tools.commands.replay.__main__", "run an engine's capture again and compare"),
    "verify": ("tools.commands.verify.__main__", "compute receipts or a capture's answers again and compare"),
    "traces": ("tools.lab.traces.__main__", "run public request traces through the scheduler, in virtual time"),
    "forecast": ("tools.lab.forecast.__main__", "predict recorded requests on an engine, with error bars"),
    "simulate": ("tools.lab.simulate.__main__", "run a trace on a fleet of engines, in virtual time"),
    "prove": ("tools.lab.prove", "show that tokens do not depend on batch neighbours, preemption and cache"),
    "bench": ("tools.lab.bench.__main__", "measure latency, throughput and start-up"),
    "check-failover": (
        "tools.lab.check_failover.__main__",
        "kill a service under its streams and compare each with an undisturbed one",
    ),
    "eval-check": ("tools.lab.eval_check", "show that evaluations have one result at any batch size and under faults"),
    "check-kv-connector": (
        "tools.lab.check_kv_connector.__main__",
        "check that a plug-in store of KV blocks follows the contract",
    ),
    "check-executor": ("tools.lab.check_executor.__main__", "check that a plug-in executor follows the contract"),
    "check-scheduler": ("tools.lab.check_scheduler.__main__", "check that a plug-in scheduler follows the contract"),
    "completion": ("tools.commands.completion", "print the completion script for bash, zsh or fish"),
}
#: Headings of --help; commands under no heading come last.
GROUPS = {
    "ask a model": ("chat", "run", "generate", "embed"),
    "models": ("pull", "list", "inspect", "rm", "ps", "stop"),
    "serve a model": ("serve", "worker", "route", "ray", "http"),
    "inspect and control a running engine": ("top", "explain", "control"),
    "prove, replay, measure": (
        "prove",
        "record",
        "eval-check",
        "replay",
        "verify",
        "check-failover",
        "forecast",
        "traces",
        "simulate",
        "bench",
    ),
}
#: Prefix of the package "tools": "" in a checkout, "engine_core." in an installed wheel.
HOME = __package__.removesuffix("tools")
