#!/bin/sh
# One table of the paper, start to end: Table 6's ablations on Python's own source, at the scale of this machine. Hours; stopped, it goes on.
#   sh examples/one_table.sh                 reads studies/ablation-encoding.md in the end
set -eu
txl prepare python --out data/python
txl study "${1:-ablation-encoding}" --data data/python --scale "${2:-tiny}" --seeds "${3:-3}"
