#!/bin/sh
# What an image's own command looks like to people: a script that prepares a little and then trains.
echo "entry.sh in $(pwd) as $(id -u), $# arguments: $*"
exec python3 /app/train.py "$@"
