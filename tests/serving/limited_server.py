"""A server whose address space ends so many megabytes past what it takes before it loads a model: arguments are those, then `txl serve`'s."""

import resource
import sys
from pathlib import Path

from transformer_xl.cli import main
from transformer_xl.serving.api import app

assert app
taken = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
limit = int(taken.split()[1]) * 1024 + int(sys.argv[1]) * 1_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(main(["serve", *sys.argv[2:]]))
