"""`python -m diffusion_forcing` is `dforce`; torchrun starts it this way."""

from .engine.cli import main

if __name__ == "__main__":
    main()
