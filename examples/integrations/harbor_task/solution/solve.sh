#!/bin/bash
set -eu
tail -n +2 tides.csv | sort -t, -k2 -n | tail -1 | cut -d, -f1 >answer.txt
echo solved
