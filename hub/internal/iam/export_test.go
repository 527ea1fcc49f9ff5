package iam

// SortBindings makes the order that Bindings promises.
func (p *Principal) SortBindings() { p.sortBindings() }
