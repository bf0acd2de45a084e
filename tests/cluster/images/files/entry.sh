#!/bin/sh
# A typical image command: a script that prepares a little and then trains.
echo "entry.sh in $(pwd) as $(id -u), $# arguments: $*"
exec python3 /app/train.py "$@"
