"""Its being here puts this folder on the import path: tests everywhere below import `fakes`."""
