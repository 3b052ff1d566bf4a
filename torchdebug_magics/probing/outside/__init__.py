"""A rerun leaves the disk and the outside world as one plain run would: hear and look -> copy -> rerun -> put back, or refuse.

`acts` hears of each act before it happens, `open_files` keeps files that are open, `unseen_changes` finds what writers that bypass Python
have changed; `effects` is what an instrument uses. The copies are in `machine.kept_files`.
"""
