"""The command line: `daypack compare`, `train` and `plan`, and commands on files of optimizer state."""

import sys
from typing import TextIO

ERROR = 2  # exit code of every refused input
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT


class Interrupted(Exception):
    """Ctrl-C in a job; the message says what was kept. Typer would swallow a KeyboardInterrupt."""


def main() -> None:
    """Entry point of the `daypack` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    Bad input ends in one line on stderr and code 2, Ctrl-C in one line and code 130. A traceback is a bug of daypack.
    """
    for stream in (sys.stdout, sys.stderr):
        _never_fail_on_a_character(stream)
    try:
        from daypack.cli.app import app

        code = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, Interrupted) as error:
        print(f"daypack: interrupted{error}", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"typer", "rich", "matplotlib", "jinja2"}:
            raise
        return _refuse(f"the command line needs {error.name}; pip install 'daypack[cli]'")
    except OSError as error:
        return _refuse(
            f"{error.filename or 'a file'}: {error.strerror or error}; check the path, permissions and free space"
        )
    except ValueError as error:
        return _refuse(str(error))
    except Exception as error:
        # Typer has changed where its own exceptions live, but not what they are.
        if type(error).__name__ == "Abort":  # Ctrl-C while no job was running
            return INTERRUPTED
        if not hasattr(error, "format_message"):
            raise
        return _refuse(f"{error.format_message().rstrip('.')}; see daypack --help")
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    print("daypack: error: " + " ".join(message.split()), file=sys.stderr)
    return ERROR


def _never_fail_on_a_character(stream: TextIO) -> None:
    """A terminal that cannot show ± gets a question mark instead of a traceback."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
