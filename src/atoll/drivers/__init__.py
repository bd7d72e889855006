"""How a sandbox is isolated. One module per kind; each implements `contract.driver.Driver`."""
