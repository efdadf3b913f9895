#!/bin/sh
# Tunes in ABC notation are text: learns a folder of them and writes a new one, which any ABC program plays.
#   sh examples/music.sh tunes/ 10
# Thousands of folk songs are in the package music21: pip download --no-deps music21, and unzip it.
set -eu
txl fit "$1" --include '*.abc' --minutes "${2:-4}" --run runs/music
txl generate runs/music --prompt "X:1
T:" --tokens 300 --temperature 0.8 --stop "

" | tee new.abc
