"""A training that was not written for Stoker: it writes into its working folder, and resumes from there by itself."""

from __future__ import annotations

TRAIN = """
import argparse, os, pickle, time
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--wait", default="")
parser.add_argument("--together", action="store_true")
args = parser.parse_args()
os.makedirs("checkpoints", exist_ok=True)
os.makedirs("runs/exp", exist_ok=True)
first, size = 0, int(os.environ.get("STOKER_WORLD_SIZE", "1"))
if os.path.exists("checkpoints/last.pkl"):
    with open("checkpoints/last.pkl", "rb") as file:
        first = pickle.load(file)["epoch"] + 1
new = "checkpoints/new-" + os.environ["STOKER_TASK_INDEX"] + ".tmp"
mark = "up-" + os.environ["STOKER_ATTEMPT"] + "-" + os.environ["STOKER_GENERATION"]
open(mark + "-" + os.environ["STOKER_TASK_INDEX"], "w").close()
while args.together and len([name for name in os.listdir(".") if name.startswith(mark)]) < size:
    time.sleep(0.02)
print("from", first, flush=True)
for epoch in range(first, args.epochs):
    while epoch == 2 and first == 0 and args.wait and not os.path.exists(args.wait):
        time.sleep(0.02)
    with open(new, "wb") as file:
        pickle.dump({"epoch": epoch, "rank": os.environ.get("RANK")}, file)
    if os.environ.get("STOKER_TASK_INDEX", "0") == "0":
        os.replace(new, "checkpoints/last.pkl")
    with open("runs/exp/log.csv", "a") as file:
        file.write(f"{epoch}\\n")
    print("epoch", epoch, flush=True)
with open("plot.png", "wb") as file:
    file.write(b"picture")
"""
"""`--wait FILE`: the first time, it waits before epoch 2 until the file exists. `--together`: until all tasks have started in one folder."""
