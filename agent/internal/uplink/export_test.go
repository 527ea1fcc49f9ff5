package uplink

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"

	"github.com/gpuaas/gpuaas/protocol/link"
)

// SetConnect replaces how the hub is dialled.
func (u *Uplink) SetConnect(connect func(context.Context, string, *tls.Config, *link.Tokens) (*link.Conn, error)) {
	u.connect = connect
}

// SetRandom replaces what spreads the dials.
func (u *Uplink) SetRandom(random func() float64) { u.random = random }

// PublicKey is the node's.
func (c *Credentials) PublicKey() ed25519.PublicKey { return c.public() }

// Save stores an identity and its certificate as an enrollment does.
func (c *Credentials) Save(id Identity, chain []byte) error {
	_, err := c.save(id, chain)
	return err
}
