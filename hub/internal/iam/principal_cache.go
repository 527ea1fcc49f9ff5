package iam

import (
	"crypto/sha256"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

const (
	// maxCachedPrincipals bounds the tokens that are remembered; those used longest ago go first.
	maxCachedPrincipals = 4096
	// PrincipalCacheAge is how long a token is remembered: so late this process notices a change that another one makes.
	// A program that ends tokens beside the hub waits that long before it says so.
	PrincipalCacheAge = time.Second
)

// principalTables are those that Authenticate reads.
func principalTables() []string {
	return []string{
		"users", "user_tokens", "role_bindings", "custom_roles", "service_accounts", "service_account_keys",
		"iam_signing_keys",
	}
}

// PrincipalCache remembers for a moment whom a token belongs to. It forgets everything when a transaction of this
// process that changed any of that has committed, before the transaction's caller learns of it: a revoked token does
// not count any more. Make one with NewPrincipalCache; a nil one remembers nothing.
type PrincipalCache struct {
	mu sync.Mutex
	// epoch is how often all was forgotten: what was read before the last time is not remembered after it.
	epoch uint64
	of    *lru.Cache[[sha256.Size]byte, cachedPrincipal]
}

type cachedPrincipal struct {
	principal Principal
	// from and until bound when it counts.
	from, until time.Time
}

// NewPrincipalCache makes a cache for the principals of a database.
func NewPrincipalCache(d *db.DB) *PrincipalCache {
	of, _ := lru.New[[sha256.Size]byte, cachedPrincipal](maxCachedPrincipals) // it refuses sizes below 1 only
	c := &PrincipalCache{of: of}
	d.OnWrite(principalTables(), c.forget)
	return c
}

func (c *PrincipalCache) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	c.of.Purge()
}

// principal returns whom a token belongs to, and calls read where that is not remembered. read also returns until when
// the token counts.
func (c *PrincipalCache) principal(token string, now time.Time,
	read func() (p Principal, until time.Time, err error),
) (Principal, error) {
	if c == nil {
		p, _, err := read()
		return p, err
	}
	key := sha256.Sum256([]byte(token))
	c.mu.Lock()
	known, found := c.of.Get(key)
	epoch := c.epoch
	c.mu.Unlock()
	if found && !now.Before(known.from) && now.Before(known.until) {
		return known.principal, nil
	}
	p, until, err := read()
	if err != nil {
		return Principal{}, err
	}
	p = p.remembering()
	if end := now.Add(PrincipalCacheAge); end.Before(until) {
		until = end
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.epoch == epoch {
		c.of.Add(key, cachedPrincipal{principal: p, from: now, until: until})
	}
	return p, nil
}
