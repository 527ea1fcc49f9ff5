package iam

// SortBindings makes the order that Bindings promises.
func (p *Principal) SortBindings() { p.sortBindings() }

// Len is how many tokens the cache remembers.
func (c *PrincipalCache) Len() int { return c.of.Len() }

// PrincipalTables are those whose changes the cache learns of.
func PrincipalTables() []string { return principalTables() }

// StatementsOfAuthenticate are those by which Authenticate reads.
func StatementsOfAuthenticate() []string { return []string{selectAccountByToken, selectByToken} }

// WithoutMemo is the principal as it was read.
func WithoutMemo(p Principal) Principal {
	p.memo = nil
	return p
}
