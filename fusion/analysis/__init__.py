"""Decisions about canonical values that know no domain: lanes, row layouts, masks as formulas, intervals, constants."""
