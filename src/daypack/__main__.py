"""``python -m daypack``, as torchrun starts it."""

from daypack.cli import main

if __name__ == "__main__":
    main()
