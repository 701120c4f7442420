"""Language models: one file per family, found by the name in the recipe (``language.family``).

What a file offers is said by `mimo.families.contracts.LanguageFamily`.
"""
