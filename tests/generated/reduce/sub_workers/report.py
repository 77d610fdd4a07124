"""Without a body: whoever prepares the program binds it."""


def report(args):
    raise RuntimeError("sub-worker 'report' is bound at run time; give it in the callbacks")
