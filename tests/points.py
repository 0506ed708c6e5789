"""The program that tests of staged data run in a job: a line through a dataset's points."""

_TRAIN = """
import glob, json, os
data, results = os.environ["CARME_DATA"] + "/{dataset}", os.environ["CARME_RESULTS"]
points = [tuple(map(float, line.split())) for name in glob.glob(data + "/part*") for line in open(name)]
a = b = 0.0
for _ in range(400):
    da = sum((a * x + b - y) * x for x, y in points) / len(points)
    db = sum((a * x + b - y) for x, y in points) / len(points)
    a, b = a - da, b - db
json.dump([round(a, 1), round(b, 1)], open(results + "/line.json", "w"))
changed = ""
try:
    open(data + "/part0", "a")
except OSError as error:
    changed = error.strerror
print(json.dumps([len(points), os.path.realpath(data), round(a, 1), round(b, 1), changed]))
"""


def training(dataset: str) -> str:
    """Finds the line by steps down the slope, from files `part*` with an `x y` a line.

    It writes slope and offset to `line.json` among the results, and prints as JSON how many points there
    were, where they lay, slope, offset, and why nothing could be written there.
    """
    return _TRAIN.replace("{dataset}", dataset)
