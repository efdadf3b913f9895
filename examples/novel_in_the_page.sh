#!/bin/sh
# A novel, continued in a browser: learns it, then opens a page that goes on with what you write and shows what the model remembers and looks at.
#   sh examples/novel_in_the_page.sh novel.txt 10        ten minutes of learning; then http://127.0.0.1:8000
set -eu
txl fit "$1" --minutes "${2:-4}" --run runs/novel-in-the-page
txl generate runs/novel-in-the-page --tokens 100
txl serve runs/novel-in-the-page --port "${3:-8000}"
