"""Everything that makes a miniature checkpoint: the corpus, the tokenizer and the training loop.

Nothing outside this package imports it: a trained checkpoint is used without the code that trained it.

    python -m workbench.training.corpus   --work DIR --out DIR       fetch, clean, split the public-domain
    text python -m workbench.training.tokenize --corpus DIR --out DIR     train the tokenizer, write the token
    files
"""
