"""The private loop seen from outside: `run_party` observed, checked by an oracle, and spoilt on purpose.

`observe` writes down what a training really does, `checks` states what must hold of it, `defects` plants mistakes into
the loop's own source. None of them knows another's: a check is written for a property, a defect for a mistake.
"""
