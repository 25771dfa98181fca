"""Exit codes of every command."""

#: Nothing to object to; a fault was found; unusable input, told in one line on stderr.
FINE, FAULT, UNUSABLE = 0, 1, 2
#: A defect of the workbench itself: an exception that nobody raised on purpose (EX_SOFTWARE of sysexits.h).
DEFECT = 70
#: Stopped from the keyboard; the reader of the output went away. Both as a shell counts them.
STOPPED, READER_GONE = 130, 141
