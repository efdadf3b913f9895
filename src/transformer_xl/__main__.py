"""`python -m transformer_xl` is `txl`, and what torchrun starts."""

import os
import sys

from transformer_xl.cli import main

exit_code = main()
if "TORCHELASTIC_RUN_ID" in os.environ:
    # A process group's threads can abort an interpreter that winds down, after everything is written (seen with gloo, once in some hundred runs).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
sys.exit(exit_code)
