"""``python -m overlapsim.validate`` and ``torchrun -m overlapsim.validate``."""

from overlapsim.validate.cli.main import main

main()
