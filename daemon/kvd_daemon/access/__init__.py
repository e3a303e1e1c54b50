"""Who may do what: roles, rules, credentials, and a record of what was refused or taken away."""
