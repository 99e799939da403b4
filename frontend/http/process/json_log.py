"""The HTTP process's warnings and errors as JSON lines, for --log-format json."""

import logging

from ipc.log_lines import log_line


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, message, level, logger, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        fields = {"level": record.levelname.lower(), "logger": record.name}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return log_line("json", record.getMessage(), fields)


def log_as_json() -> None:
    """Let all loggers of this process write such lines to standard error. For a process's entry."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
