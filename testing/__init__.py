"""What users test their own stages, engines and verifiers with."""
