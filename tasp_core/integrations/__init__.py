"""Thin adapters on public interfaces of other libraries; each file needs the library it names."""
