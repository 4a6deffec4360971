"""Training of drafts: anchors, teacher-forced forward, losses."""
