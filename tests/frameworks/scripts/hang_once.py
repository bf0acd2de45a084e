"""In the first generation rank 1 never reaches the tenth step, and rank 0 waits for it for ever."""

import os
import time

import loop
import plain_sum


def out_for_lunch():
    while True:
        time.sleep(0.1)


def add(number):
    if plain_sum.rank == 1 and number > 20 and os.environ["STOKER_GENERATION"] == "1":
        out_for_lunch()
    return plain_sum.add(number)


loop.train(plain_sum.rank, plain_sum.world, add)
