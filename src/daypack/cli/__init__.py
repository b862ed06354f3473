"""The command line: `daypack compare`, `train` and `plan`, and commands on files of optimizer state."""

import re
import sys
from typing import TextIO

ERROR = 2  # exit code of every refused input
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it: 128 + SIGINT
TERMINATED = 143  # exit code after SIGTERM


class Interrupted(Exception):
    """A signal in a job; the message says what was kept. Typer would swallow a KeyboardInterrupt.

    Attributes:
        code: the exit code, 128 + the signal.
    """

    def __init__(self, message: str, code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    """Run the `daypack` command and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    Bad input ends in one line on stderr and code 2, Ctrl-C in one line and code 130. A traceback is a bug of daypack.
    Without arguments it shows its help.
    """
    for stream in (sys.stdout, sys.stderr):
        _never_fail_on_a_character(stream)
    try:
        from daypack.cli.app import app

        code = app(arguments or ["--help"], prog_name="daypack", standalone_mode=False)
    except (KeyboardInterrupt, Interrupted) as error:
        print(f"daypack: interrupted{error}", file=sys.stderr)
        return getattr(error, "code", INTERRUPTED)
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
        if (wanted := _wanted_memory(error)) is not None:
            return _refuse(
                f"not enough memory{wanted}; ask for less (of train: a smaller --batch, --context or --model)"
            )
        # Typer has changed where its own exceptions live, but not what they are.
        if type(error).__name__ == "Abort":  # Ctrl-C while no job was running
            return INTERRUPTED
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "daypack")
        return _refuse(f"{error.format_message().rstrip('.')}; see {command} --help")
    return code if isinstance(code, int) else 0


def _wanted_memory(error: Exception) -> str | None:
    """Return how much memory could not be allocated, as text for a message; None for an error of another kind."""
    text = str(error)
    if not (isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower()):
        return None
    found = re.search(r"allocate (\d+) bytes", text)
    return f": {int(found[1]):,} bytes in one piece" if found else ""


def _refuse(message: str) -> int:
    print("daypack: error: " + " ".join(message.split()), file=sys.stderr)
    return ERROR


def _never_fail_on_a_character(stream: TextIO) -> None:
    """Make ``stream`` print a question mark for a character that it cannot show (such as ±), instead of raising."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
