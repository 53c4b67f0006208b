"""The first hour on a GPU: stages in order of what they decide, each with its time limit and its result file.

stages.py    what is run, in which order, and what each stage decides
runner.py    runs stages within the given minutes; goes on where an earlier call ended
families.py  processes of stages, each with all that it has started
device.py    the first stage: the device's facts, and what copies and products reach on it
results.py   result files
    shares.py    shares of the datasheet's peaks that the device reaches
    page.py      their section of docs/hardware.md
"""
