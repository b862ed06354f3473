"""How results are shown: the colours of figures, and self-contained HTML pages. It knows no result."""
