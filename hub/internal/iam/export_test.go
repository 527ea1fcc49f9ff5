package iam

// Knowing is the action that says whether a principal may know that a resource exists.
const Knowing = knowing

// SortBindings makes the order that Bindings promises.
func (p *Principal) SortBindings() { p.sortBindings() }
