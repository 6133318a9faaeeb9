"""The command line: `gossamer doctor | methods | generate | compare | report`."""
