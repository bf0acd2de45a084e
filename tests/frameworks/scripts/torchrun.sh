#!/bin/sh
# A typical script that starts itself with torchrun, unaware of Stoker.
exec torchrun torch_sum.py
