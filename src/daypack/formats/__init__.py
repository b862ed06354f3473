"""How a moment is stored: one frozen dataclass a form, one file each."""
