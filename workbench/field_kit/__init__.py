"""`field_kit.py` beside this file is copied, alone, to where the workbench cannot be installed. See docs/field_kit.md.

Nothing of the workbench imports it, and it imports nothing of the workbench: it runs on Python 3.8 and torch 1.10.
"""
