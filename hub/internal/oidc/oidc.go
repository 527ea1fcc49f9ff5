// Package oidc asks an OpenID Connect provider who a person is: by an authorization code with PKCE, or by a device
// code. It keeps nothing and knows no users.
package oidc

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"
	"golang.org/x/sync/singleflight"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// timeout bounds each request to the provider.
	timeout         = 10 * time.Second
	deviceGrant     = "urn:ietf:params:oauth:grant-type:device_code"
	defaultInterval = 5 * time.Second
)

// Config names the provider and the client that the hub is there.
type Config struct {
	// Issuer is the URL below which /.well-known/openid-configuration is.
	Issuer                 string
	ClientID, ClientSecret string
	// RedirectURL is where the provider sends browsers back to, with a code.
	RedirectURL string
}

// Provider is an OpenID Connect provider. It is discovered when it is first asked.
type Provider struct {
	conf Config
	http *http.Client

	asking singleflight.Group
	found  atomic.Pointer[oidc.Provider]
}

// Identity is what a provider says about a person.
type Identity struct {
	Issuer, Subject, Email, Name string
	EmailVerified                bool
}

// Device is a login that the person confirms on another device.
type Device struct {
	Code, UserCode, URI, CompleteURI string
	// Life is how long the person may take; Interval is between two polls.
	Life, Interval time.Duration
}

// New prepares a provider; nothing is sent yet.
func New(conf Config) *Provider {
	return &Provider{conf: conf, http: &http.Client{Timeout: timeout}}
}

// AuthURL is where a browser logs in. The nonce and the PKCE verifier are needed again for Exchange.
func (p *Provider) AuthURL(ctx context.Context, state, nonce, verifier string) (string, error) {
	_, conf, _, err := p.discover(ctx)
	if err != nil {
		return "", err
	}
	return conf.AuthCodeURL(state, oidc.Nonce(nonce), oauth2.S256ChallengeOption(verifier)), nil
}

// Exchange returns who has logged in with the code.
func (p *Provider) Exchange(ctx context.Context, code, nonce, verifier string) (Identity, error) {
	ctx, conf, found, err := p.discover(ctx)
	if err != nil {
		return Identity{}, err
	}
	token, err := conf.Exchange(ctx, code, oauth2.VerifierOption(verifier))
	if err != nil {
		return Identity{}, refusal(err)
	}
	return p.identify(ctx, found, token, nonce)
}

// Device begins a login on another device.
func (p *Provider) Device(ctx context.Context) (Device, error) {
	ctx, conf, _, err := p.discover(ctx)
	if err != nil {
		return Device{}, err
	}
	d, err := conf.DeviceAuth(ctx)
	if err != nil {
		return Device{}, refusal(err)
	}
	return Device{
		Code:        d.DeviceCode,
		UserCode:    d.UserCode,
		URI:         d.VerificationURI,
		CompleteURI: d.VerificationURIComplete,
		Interval:    max(time.Duration(d.Interval)*time.Second, defaultInterval),
		Life:        time.Until(d.Expiry),
	}, nil
}

// Poll returns who has confirmed the login of a device code; pending says that nobody has yet.
func (p *Provider) Poll(ctx context.Context, deviceCode string) (_ Identity, pending bool, _ error) {
	ctx, conf, found, err := p.discover(ctx)
	if err != nil {
		return Identity{}, false, err
	}
	token, err := conf.Exchange(ctx, "", oauth2.SetAuthURLParam("grant_type", deviceGrant),
		oauth2.SetAuthURLParam("device_code", deviceCode))
	if refused, ok := errors.AsType[*oauth2.RetrieveError](err); ok &&
		(refused.ErrorCode == "authorization_pending" || refused.ErrorCode == "slow_down") {
		return Identity{}, true, nil
	}
	if err != nil {
		return Identity{}, false, refusal(err)
	}
	who, err := p.identify(ctx, found, token, "")
	return who, false, err
}

func (p *Provider) identify(ctx context.Context, found *oidc.Provider, token *oauth2.Token,
	nonce string,
) (Identity, error) {
	raw, _ := token.Extra("id_token").(string)
	id, err := found.Verifier(&oidc.Config{ClientID: p.conf.ClientID}).Verify(ctx, raw)
	if err != nil {
		return Identity{}, refused(err)
	}
	if id.Nonce != nonce && nonce != "" {
		return Identity{}, refused(errors.New("the nonce is of another login"))
	}
	var claims struct {
		Email         string       `json:"email"`
		EmailVerified boolOrString `json:"email_verified"`
		Name          string       `json:"name"`
	}
	if err := id.Claims(&claims); err != nil {
		return Identity{}, refused(err)
	}
	if claims.Email == "" {
		// Many providers say it at the endpoint for user information only.
		info, err := found.UserInfo(ctx, oauth2.StaticTokenSource(token))
		if err != nil {
			return Identity{}, refusal(err)
		}
		if info.Subject != id.Subject {
			return Identity{}, refused(errors.New("the user information is about another subject"))
		}
		if err := info.Claims(&claims); err != nil {
			return Identity{}, refused(err)
		}
	}
	return Identity{
		Issuer:        id.Issuer,
		Subject:       id.Subject,
		Email:         claims.Email,
		EmailVerified: bool(claims.EmailVerified),
		Name:          claims.Name,
	}, nil
}

// boolOrString is a claim that some providers send as the string "true".
type boolOrString bool

// UnmarshalJSON implements json.Unmarshaler.
func (b *boolOrString) UnmarshalJSON(text []byte) error {
	return json.Unmarshal([]byte(strings.Trim(string(text), `"`)), (*bool)(b))
}

// discover returns a context for requests to the provider, and what the provider says about itself.
func (p *Provider) discover(ctx context.Context) (context.Context, *oauth2.Config, *oidc.Provider, error) {
	ctx = oidc.ClientContext(ctx, p.http)
	found := p.found.Load()
	if found == nil {
		// One request for all who wait for it, and none of them ends it: where the provider hangs, each waits once.
		asked := p.asking.DoChan("", func() (any, error) {
			answer, err := oidc.NewProvider(context.WithoutCancel(ctx), p.conf.Issuer)
			if err == nil {
				p.found.Store(answer)
			}
			return answer, err
		})
		select {
		case answer := <-asked:
			if answer.Err != nil {
				return ctx, nil, nil, unavailable(answer.Err)
			}
			found, _ = answer.Val.(*oidc.Provider)
		case <-ctx.Done():
			return ctx, nil, nil, unavailable(ctx.Err())
		}
	}
	return ctx, &oauth2.Config{
		ClientID:     p.conf.ClientID,
		ClientSecret: p.conf.ClientSecret,
		RedirectURL:  p.conf.RedirectURL,
		Endpoint:     found.Endpoint(),
		Scopes:       []string{oidc.ScopeOpenID, "email", "profile"},
	}, found, nil
}

// refusal tells a provider that says no from one that does not answer.
func refusal(err error) error {
	if answered, ok := errors.AsType[*oauth2.RetrieveError](err); ok &&
		answered.Response.StatusCode < http.StatusInternalServerError {
		return refused(err)
	}
	return unavailable(err)
}

func refused(cause error) *fault.Error {
	return fault.New(fault.Unauthenticated, codeRefused, "The identity provider did not confirm this login: begin again.",
		cause).Permanent()
}

func unavailable(cause error) *fault.Error {
	return fault.New(fault.Unavailable, codeUnavailable, "The identity provider does not answer as it should; try again.",
		cause).RetryAfter(timeout)
}
