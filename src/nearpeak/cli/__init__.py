"""The command line, thin over the library: `main` finds the verb, `verbs/` has one module per verb."""
