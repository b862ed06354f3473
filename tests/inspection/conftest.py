"""As in the conformance suite: equal codebooks are learned once."""

from ..conformance.conftest import remembered_codebooks

__all__ = ["remembered_codebooks"]
