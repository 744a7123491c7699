"""What drafters are made of: the base class, the group-wise ones, and parts that several kinds share.

Read `drafter`, then `group_wise`. A kind of drafter is a file in `models/drafters/`, not here. May import
`models.decoding`, `models.groups` and `models.target`.
"""
