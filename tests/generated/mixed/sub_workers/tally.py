"""Adds up the first tensor into word 0 of the second."""


def tally(args):
    scratch = args[0].buffer.cast("B").cast("i")
    marks = args[1].buffer.cast("B").cast("i")
    marks[0] = sum(scratch[i] for i in range(args[0].shapes[0]))
