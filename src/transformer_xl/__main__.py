"""`python -m transformer_xl` is `txl`."""

import sys

from transformer_xl.cli import main

sys.exit(main())
