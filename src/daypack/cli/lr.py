"""The `--lr` of a comparison."""

from collections.abc import Sequence


def parse_lr(text: str | None, optimizers: Sequence[str], default: float) -> dict[str, float]:
    """Read the learning rate of each optimizer.

    Args:
        text: one number, or `name=number` for each optimizer, separated by commas; None for the default.
        optimizers: their names.
        default: what everyone gets if `text` is None.

    Raises:
        ValueError: not such a text, or it leaves an optimizer out or names one that is not there.
    """
    if text is None:
        return dict.fromkeys(optimizers, default)
    if "=" not in text:
        return dict.fromkeys(optimizers, _number(text, text))
    rates: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.partition("=")
        if not equals or name.strip() in rates:
            raise _bad(text)
        rates[name.strip()] = _number(number, text)
    if set(rates) != set(optimizers):
        raise ValueError(f"--lr {text} must name each of {', '.join(optimizers)} once, or be a single number")
    return rates


def _number(number: str, text: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise _bad(text) from None


def _bad(text: str) -> ValueError:
    return ValueError(f"cannot read --lr {text!r}; give one number as in 2e-3, or one each as in adamw=2e-3,gefen=1e-3")
