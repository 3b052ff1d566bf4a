"""From histories to findings: growth_rules at each step, standing_rules over many -> grad_findings, with grad_remedies."""
