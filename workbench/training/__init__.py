"""Everything that makes a miniature checkpoint. Nothing outside this package imports it.

Commands, in the order in which they are run; each has --help:

    python -m workbench.training.corpus           fetch, clean and split the public-domain text
    python -m workbench.training.dialogues        write conversations from a grammar, and the fixed sets
    python -m workbench.training.tokenize         train the tokenizer, write the token files
    python -m workbench.training.train            train the model
    python -m workbench.training.curve            join the curves of several runs, as a table and a figure
    python -m workbench.training.routing_corpus   choose the texts that show which experts serve what
"""
