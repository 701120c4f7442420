"""Language models: one file per family, found by its name; the contract is `LanguageFamily`."""
