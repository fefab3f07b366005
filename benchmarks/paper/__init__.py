"""The evaluation of SOSP'23 again: memory policies behind one scheduler interface, on a virtual clock.

Standard library only, except where a module says so.
"""
