"""What every command is made of: flags, help, checked options, tables, errors and signals."""
