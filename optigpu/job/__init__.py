"""What a job asks for and what came of it: spec, plan, attribution, replay."""
